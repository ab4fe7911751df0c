# SPDX-License-Identifier: Apache-2.0
"""gRPC: external processing, access logs and health; imports the core."""
