"""Training of a small DFlash drafter on a CPU: prompts, text by the target, training, offline measurement."""
