# SPDX-License-Identifier: Apache-2.0
"""Pure: which requests for tensors are joined into one call, when, and how its answer is split."""
