# SPDX-License-Identifier: Apache-2.0
"""The way of a request as plain data and functions; knows routing, admission, scheduling and what is below them."""
