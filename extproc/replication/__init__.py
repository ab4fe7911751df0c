# SPDX-License-Identifier: Apache-2.0
"""What extproc processes tell each other; knows the core."""
