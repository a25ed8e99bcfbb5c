"""A custom node folder for ComfyUI: its import makes kitchen the first backend of comfy_kitchen. It adds no nodes."""

import logging

from kitchen_models.integrations.comfy import register

NODE_CLASS_MAPPINGS: dict = {}
NODE_DISPLAY_NAME_MAPPINGS: dict = {}

logging.getLogger("kitchen").info("kitchen: serves comfy_kitchen's %s", ", ".join(register()))
