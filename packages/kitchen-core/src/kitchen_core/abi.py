"""The one number that kitchen-core and every plug-in and binary must agree on."""

KITCHEN_ABI = 1
