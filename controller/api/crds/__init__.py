# SPDX-License-Identifier: Apache-2.0
"""From structs to CustomResourceDefinitions: schemas, defaults, CEL rules, printer columns."""
