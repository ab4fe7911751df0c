# SPDX-License-Identifier: Apache-2.0
"""Messages between extproc processes; depends on the core."""
