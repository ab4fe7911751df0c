# SPDX-License-Identifier: Apache-2.0
"""From results of requests to numbers, tables and plots; depends on no other package of bench."""
