"""The commands, each group of them in a module of its own."""
