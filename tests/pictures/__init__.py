"""What the commands show, as pictures for the documentation."""
