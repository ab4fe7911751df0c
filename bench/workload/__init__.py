# SPDX-License-Identifier: Apache-2.0
"""What is sent: generated traffic and public traces as plain data; knows engine."""
