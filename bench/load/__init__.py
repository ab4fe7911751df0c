"""The load client: sends a workload and times it; knows workload and reporting."""
