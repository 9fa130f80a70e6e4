"""What masks of attention mean, for the passes that read them."""

# Added to a score of any size, this or less leaves a weight of zero beside a score that is not hidden.
HIDES = -1e30
