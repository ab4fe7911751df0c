# SPDX-License-Identifier: Apache-2.0
"""The life of a request as plain data and functions; knows admission and scheduling."""
