# SPDX-License-Identifier: Apache-2.0
"""What the request path costs beside baselines of the same run, and its parts alone."""
