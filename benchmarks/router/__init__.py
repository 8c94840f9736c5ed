"""The router's index beside Dynamo's."""
