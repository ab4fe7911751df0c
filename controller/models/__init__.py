# SPDX-License-Identifier: Apache-2.0
"""Model and ModelInfer: what is observed of them, what is decided, and the loops that carry it out."""
