"""Which runs to make: study -> plan -> workers -> results, and the command line."""
