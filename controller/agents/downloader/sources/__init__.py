# SPDX-License-Identifier: Apache-2.0
"""Where weights come from: one module a scheme, behind one protocol."""
