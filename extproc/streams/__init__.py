"""gRPC: external processing, access logs and health; knows the core."""
