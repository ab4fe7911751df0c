"""The policy lab: one workload, many policies; knows policies, virtual, workload."""
