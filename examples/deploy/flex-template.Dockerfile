# An image of lum image that Dataflow can also start as a Flex template. docs/deploy.md explains it.
#
#   docker build --tag REGISTRY/shop:1-template --file flex-template.Dockerfile .
#
FROM REGISTRY/shop:1
COPY --from=gcr.io/dataflow-templates-base/python311-template-launcher-base:TAG \
    /opt/google/dataflow/python_template_launcher /opt/google/dataflow/python_template_launcher
ENV FLEX_TEMPLATE_PYTHON_PY_FILE=/app/pipeline/pipeline.py
# The entry point stays: workers start in this image, too.
