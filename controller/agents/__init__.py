# SPDX-License-Identifier: Apache-2.0
"""What runs beside engines in their pods: the downloader of weights and the runtime agent."""
