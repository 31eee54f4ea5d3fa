"""Many runs that answer one question: searches for good values of keys, and comparisons with intervals."""
