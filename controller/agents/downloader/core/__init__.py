# SPDX-License-Identifier: Apache-2.0
"""What a download decides, without a network, files or a clock."""
