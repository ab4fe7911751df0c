# SPDX-License-Identifier: Apache-2.0
"""Public formats of traces: each module turns the rows of one into sessions."""
