# SPDX-License-Identifier: Apache-2.0
"""KEDA's external scaler: its ScaledObjects read what we decided, and are told at once when a target wakes up."""
