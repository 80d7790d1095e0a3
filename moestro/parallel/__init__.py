"""Many ranks as one: layouts, meshes, collectives and the forms of parallelism that the model is given from outside."""
