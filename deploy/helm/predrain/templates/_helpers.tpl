{{/* Labels of everything: who made it, and from what. Those that select pods stand with the components. */}}
{{- define "predrain.labels" -}}
app.kubernetes.io/name: predrain
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- define "predrain.image" -}}
{{- printf "%s:%s" .Values.image.repository .Values.image.tag | quote -}}
{{- end -}}

{{/* The account that the controller runs under. */}}
{{- define "predrain.account" -}}
predrain-{{ .Values.act.rights }}
{{- end -}}

{{- define "predrain.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "predrain.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}
