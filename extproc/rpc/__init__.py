# SPDX-License-Identifier: Apache-2.0
"""A gRPC server: HTTP/2 as an object without I/O, and calls on top of it."""
