{{- define "gpu-efficiency.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{ .Release.Name | trunc 63 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 63 | trimSuffix "-" }}
{{- end -}}
{{- end -}}

{{- define "gpu-efficiency.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "gpu-efficiency.labels" -}}
{{ include "gpu-efficiency.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "gpu-efficiency.image" -}}
{{- $repository := required "image.repository is empty and no image is published: build one from the Dockerfile, push it and name it" .Values.image.repository -}}
{{- if .Values.image.digest -}}
{{ $repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ $repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{- /* Not the exporters' own labels, or their Service and PodMonitor would take it for one of them. */ -}}
{{- define "gpu-efficiency.cluster.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}-cluster
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "gpu-efficiency.cluster.labels" -}}
{{ include "gpu-efficiency.cluster.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}
