"""Public formats of traces: each module turns the rows of one into sessions."""
