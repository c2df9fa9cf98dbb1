"""The parts of ``tilewise tune``: which configs there are, and the work of checking and timing them."""
