"""What happens on a device: requests' mirror, batch, block tables, forward pass, KV memory."""
