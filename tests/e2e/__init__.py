"""End-to-end tests: from a checkpoint to tokens on the CPU target."""
