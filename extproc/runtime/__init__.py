# SPDX-License-Identifier: Apache-2.0
"""One process or several: puts the parts together; knows all but the command line."""
