"""The shared KV pool: device arrays, page allocation, and the index of segments."""
