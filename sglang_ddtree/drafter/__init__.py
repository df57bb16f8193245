"""The drafter's side: reading its files and checking that it fits the target, without loading either model."""
