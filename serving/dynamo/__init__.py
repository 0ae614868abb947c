"""A worker of Dynamo: token ids in, token ids out."""
