# SPDX-License-Identifier: Apache-2.0
"""Model: the objects that one Model stands for, and what its status says of them."""
