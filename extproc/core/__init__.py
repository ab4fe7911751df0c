# SPDX-License-Identifier: Apache-2.0
"""The life cycle of a request as plain data and functions; imports admission and scheduling."""
