# SPDX-License-Identifier: Apache-2.0
"""What runs: each role of the controller as a few tasks around pure functions."""
