"""Files that an export copies as they are: each runs where mutransfer is not installed."""
