"""From results of requests to numbers, tables and plots; knows nothing else of bench."""
