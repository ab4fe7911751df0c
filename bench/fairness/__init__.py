"""What queues do for tenants, in virtual time; knows virtual, workload, reporting."""
