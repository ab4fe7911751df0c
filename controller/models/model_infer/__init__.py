# SPDX-License-Identifier: Apache-2.0
"""ModelInfer: groups of roles kept, changed, recovered and scaled."""
