# SPDX-License-Identifier: Apache-2.0
"""Generated traffic and public traces as plain data; depends on engine."""
