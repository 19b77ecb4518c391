"""The parts that a decoder is made of: linears, norms, embedding, rotation, feed-forward. They know tensors only."""
