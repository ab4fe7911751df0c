"""Public formats of traces: each module reads rows of one, and makes sessions of them."""
