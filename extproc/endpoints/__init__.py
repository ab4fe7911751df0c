# SPDX-License-Identifier: Apache-2.0
"""What is known of endpoints: load, reports and learned speeds, as columns of numbers."""
