# SPDX-License-Identifier: Apache-2.0
"""Bodies of all inference APIs: read for decisions, and changed where engines need it."""
