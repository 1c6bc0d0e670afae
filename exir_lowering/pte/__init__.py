"""Every byte of a `.pte` and of the files beside it: read, checked, written."""
