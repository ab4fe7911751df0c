# SPDX-License-Identifier: Apache-2.0
"""What was decided, for other autoscalers: the external metrics API for HPAs, and KEDA's external scaler."""
