"""Measuring DDTree: prompt sets that need no network once fetched, and the benchmark built on them."""
