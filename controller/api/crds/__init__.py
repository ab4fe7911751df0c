# SPDX-License-Identifier: Apache-2.0
"""From structs to the schemas of CustomResourceDefinitions: defaults, CEL rules, descriptions."""
